"""Choosing tokens inside an OpenVINO graph: the best one, or one drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
from openvino import opset13 as ops

from foretoken.models.chain import UNITS
from foretoken.models.native.graph_nodes import Constants


def best_tokens(x: Any, logits: Any, vocab_size: int, constants: Constants) -> Any:
    """``[S]`` int32: the tokens of the highest logits, the lowest id of equal ones; `vocab_size` where any is NaN.

    OpenVINO's own operation for this (TopK) uses one thread and no vector instructions.

    Args:
        x: ``[S, hidden]``, what the logits were computed from: NaN there means NaN in the logits.
        logits: ``[S, V]``.
        vocab_size: V.
        constants: of the graph.
    """
    is_best = ops.equal(logits, ops.reduce_max(logits, constants.i32([1]), True))
    countdown = constants.array(np.arange(vocab_size, 0, -1, dtype=np.float32)[None])  # exact up to 2 ** 24
    rank = ops.reduce_max(ops.select(is_best, countdown, constants.f32(0.0)), constants.i32([1]), False)
    total = ops.reduce_sum(x, constants.i32([1]), False)
    rank = ops.select(ops.equal(total, total), rank, constants.f32(0.0))
    return ops.convert(ops.subtract(constants.f32(float(vocab_size)), rank), "i32")


def draw_tokens(
    logits: Any, inverse_temperatures: Any, uniforms: Any, vocab_size: int, constants: Constants
) -> tuple[Any, Any]:
    """Draw from the softmax of logits over temperature, by inverting its cumulative distribution.

    Sums of float32 are rounded, and their differences are not the probabilities that were summed. So the cumulative
    distribution is rounded to whole units, as are the uniforms, and its differences are the distribution q: then q of
    every token is known exactly.

    Args:
        logits: ``[S, V]``.
        inverse_temperatures: ``[S, 1]``.
        uniforms: ``[S, 1]``, whole numbers from 0 to `UNITS` - 1.
        vocab_size: V.
        constants: of the graph.

    Returns:
        ``[S]`` int32, the tokens, `vocab_size` where a logit is NaN; and ``[S, V]`` float32, the cumulative
        distribution in whole units.
    """
    over = ops.subtract(logits, ops.reduce_max(logits, constants.i32([1]), True))
    sums = ops.cum_sum(ops.exp(ops.multiply(over, inverse_temperatures)), constants.i32(1))
    total = ops.gather(sums, constants.i32([vocab_size - 1]), constants.i32(1))
    # A product of a sequence that never falls with a positive number never falls either.
    cumulative = ops.floor(ops.multiply(sums, ops.divide(constants.f32(float(UNITS)), total)))
    # It ends with all units, which rounding may have missed by one or two.
    end = constants.array(np.array([[0.0] * (vocab_size - 1) + [float(UNITS)]], dtype=np.float32))
    cumulative = ops.minimum(ops.maximum(cumulative, end), constants.f32(float(UNITS)))
    # The runtime's exponential may make numbers of NaN.
    differences = ops.reduce_sum(over, constants.i32([1]), True)
    sound = ops.equal(differences, differences)
    cumulative = ops.select(sound, cumulative, end)
    below = ops.convert(ops.less_equal(cumulative, uniforms), "f32")
    drawn = ops.reduce_sum(below, constants.i32([1]), False)
    token = ops.select(ops.squeeze(sound, constants.i32([1])), drawn, constants.f32(float(vocab_size)))
    return ops.convert(token, "i32"), cumulative
