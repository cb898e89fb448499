"""The engine: requests in, rounds of draft, score, verify and commit, completions out."""
