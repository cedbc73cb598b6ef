"""What is kept for backward under a budget: held, computed again, or spilled to slower memory.

choice     what to do with each segment and value of a program
saving     autograd's hooks that carry out a choice
spill      the pool of slower memory, and the copies to and from it
"""

__all__: list[str] = []
