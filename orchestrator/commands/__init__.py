"""The commands of `rlooper`, one file each: a function that takes the command line after its name and returns the exit code.

The first line of its docstring is its line in `rlooper --help`. It imports heavy libraries only once it needs them.
"""
