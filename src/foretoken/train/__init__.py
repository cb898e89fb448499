"""Training drafters for a target: small models, Medusa heads, EAGLE-3 heads."""

from foretoken.train.course import Course
from foretoken.train.errors import TrainingError
from foretoken.train.run import Corpus, DrafterShape, State, TrainingReport, train

__all__ = ["Corpus", "Course", "DrafterShape", "State", "TrainingError", "TrainingReport", "train"]
