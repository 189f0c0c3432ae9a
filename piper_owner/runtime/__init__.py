"""Ray: one actor per device, and the driver that leads them. The only importer of ray.

Importing this package alone does not import ray, so that `environment.prepare` can run first.
"""
