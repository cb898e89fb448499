"""A dozen prompts, so that the benchmark runs without any file. Three kinds of four; nothing was trained on them."""

from __future__ import annotations

MATHS = (
    "A baker sells 12 loaves in the morning and twice as many in the afternoon. How many loaves does she sell a day?",
    "Lena has 45 stickers. She gives 9 to each of her 3 brothers. How many stickers does she keep?",
    "A train ride costs 8 dollars. Tickets for children cost half of that. What do 2 adults and 3 children pay?",
    "Sam reads 20 pages a day for 6 days. His book has 150 pages. How many pages are left to read?",
)

CODE = (
    'def count_vowels(text):\n    """Return how many vowels there are in a text."""\n',
    'def is_sorted(numbers):\n    """Return whether each number is at least as large as the one before it."""\n',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    'def read_table(path):\n    """Read a file of comma-separated values into a list of dicts."""\n    rows = []\n',
)

PROSE = (
    "My fellow citizens, we meet today at a time of great change, and I ask you to remember what",
    "The old king rose from his chair, looked at the two brothers, and said in a low voice:",
    "Between the river and the hills there lies a town where nobody locks a door, because",
    "There are three reasons why a people that wants to stay free must also want to be taught. The first",
)
