"""The commands, one a module: ``add`` declares it, ``run`` carries it out.

torch, rich and everything that imports them is imported inside ``run``: patching an
engine needs neither, and takes less time than their import.
"""
