"""Independent references of the field's objectives: float64, plain loops over sequences and tokens, each written from its paper; and the tests that
hold the implementation against them.

A batch is a list of groups, a group a list of responses, a response a list of tokens; a token that is no action has False in the mask, and no
reference ever reads what stands there.
"""
