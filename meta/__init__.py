"""Fake implementations: what torch.compile, torch.export and meta tensors see of each operator.

A transfer returns nothing, so that all a fake has to do is to refuse bad calls, at trace time, with the words of the
C++.
"""

from kvops.meta import move, transfer

__all__ = ["move", "transfer"]
