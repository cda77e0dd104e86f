"""The example tasks: what the application does, with no SQL and no word about brokers.

Each is a plain ``shared_task``: the application decides where they run. A task may run more than once (its worker can
die between the work and the word about it), so each is written to give the same end when it runs again.
"""
