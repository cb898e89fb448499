"""Programs that run a subject in an interpreter of its own, and speak JSON lines with `foretoken.audit.external`.

They import nothing of Foretoken, so that they run wherever the subject is installed.
"""
