from __future__ import annotations

import torch

from foretoken.draft import Draft


def tree() -> Draft:
    #      0
    #     1 2
    #    3   4      (row 0); row 1 is a chain of two
    return Draft(
        tokens=torch.tensor([[5, 6, 7, 8], [1, 2, 0, 0]]),
        parents=torch.tensor([[0, 0, 1, 2], [0, 1, 0, 0]]),
        counts=torch.tensor([4, 2]),
    )


def test_depths_of_a_tree():
    assert tree().depths()[0].tolist() == [0, 1, 1, 2, 2]
    assert tree().depths()[1, :3].tolist() == [0, 1, 2]


def test_paths_of_a_tree():
    nodes, counts = tree().path(torch.tensor([4, 2]))
    assert nodes.tolist() == [[2, 4], [1, 2]]
    assert counts.tolist() == [2, 2]
    nodes, counts = tree().path(torch.tensor([0, 1]))
    assert counts.tolist() == [0, 1]
    assert nodes.tolist() == [[0], [1]]


def test_a_chain_is_a_tree_with_one_branch():
    chain = Draft.chain(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([3, 1]))
    general = Draft(chain.tokens, chain.parents, chain.counts)
    assert torch.equal(chain.ancestors(), general.ancestors())
    assert torch.equal(chain.depths(), general.depths())
    for node in (torch.tensor([0, 0]), torch.tensor([3, 1]), torch.tensor([2, 0])):
        for ours, theirs in zip(chain.path(node), general.path(node), strict=True):
            assert torch.equal(ours, theirs)
    assert chain.used().tolist() == [[True, True, True], [True, False, False]]


def test_an_empty_draft_has_only_roots():
    empty = Draft.empty(3)
    assert (empty.batch_size, empty.width) == (3, 0)
    nodes, counts = empty.path(torch.zeros(3, dtype=torch.int64))
    assert nodes.shape == (3, 0)
    assert counts.tolist() == [0, 0, 0]


def test_from_lists_pads():
    draft = Draft.from_lists([[1, 2], [], [3]])
    assert draft.tokens.tolist() == [[1, 2], [0, 0], [3, 0]]
    assert draft.counts.tolist() == [2, 0, 1]
    assert Draft.from_lists([[], []]).width == 0
