"""What the supervisor needs before and around its children: settings, the plan, sockets, processes, the summary.

Imported by `supervisor` alone; like it, imports neither torch nor numpy.
"""
