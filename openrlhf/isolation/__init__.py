"""Code that may hang, crash or misbehave, in processes that can be killed: user functions, agents,
sandboxed programs.
"""
