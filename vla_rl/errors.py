"""The root of every error whose text is written for the user."""


class UserError(ValueError):
    """Something the user gave cannot be used: a recipe, a file, a name, a mismatch between two parts.

    The command line prints its text without a traceback and exits with status 2; every other exception is a bug
    or a broken machine and keeps its traceback. The text names what, where, what is allowed, and the remedy.
    """
