"""A cheaper draft from a checkpoint that stays untouched.

The steps, each a sub-command of ``loadplan drafter``: ``capture`` hidden states at the
output head, choose the draft's ``vocab``, ``quantize`` the head, put together the
``variant``, ``verify`` it. No step writes to the checkpoint.
"""
