"""Training drafters for a target: small models, Medusa heads, EAGLE-3 heads."""

from foretoken.train.errors import TrainingError
from foretoken.train.loop import Course
from foretoken.train.run import Corpus, Report, Shape, State, train

__all__ = ["Corpus", "Course", "Report", "Shape", "State", "TrainingError", "train"]
