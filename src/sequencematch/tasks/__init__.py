"""Data to train and test on: arithmetic, text, translation, path-star graphs, Sudoku, files of rows, a base class for others."""

from collections.abc import Mapping

from sequencematch.tasks.arithmetic import Arithmetic
from sequencematch.tasks.generator import Question, questions
from sequencematch.tasks.path_star import PathStar
from sequencematch.tasks.rows import Rows
from sequencematch.tasks.sudoku import Sudoku
from sequencematch.tasks.task import Row, Task, write_rows
from sequencematch.tasks.text import Text
from sequencematch.tasks.translation import Translation
from sequencematch.tasks.vocabulary import word_tokenizer

#: Name → task.
TASKS: Mapping[str, type[Task]] = {task.name: task for task in (Arithmetic, Text, Translation, PathStar, Sudoku, Rows)}

__all__ = [
    "TASKS",
    "Arithmetic",
    "PathStar",
    "Question",
    "Row",
    "Rows",
    "Sudoku",
    "Task",
    "Text",
    "Translation",
    "questions",
    "word_tokenizer",
    "write_rows",
]
