"""Statistics on counts and ids: what a sampler must satisfy, and what a given number of draws can see.

Nothing here knows a sampler by name and nothing prints. `battery.TESTS` is the visible list of tests.
"""
