"""What the supervisor needs before and around its children: settings, the plan, sockets, processes, the summary.

Imported by `vecd.supervisor` and the `vecd` command; imports neither torch nor numpy.
"""
