"""Other engines as subjects of `bench` and `audit`.

Each engine runs in a process of its own (`process.Worker`), in an environment of its own (`environments`), as one
program in `workers`, which speaks JSON lines (`workers.protocol`). `kinds` lists the engines.
"""
