"""What a command found, told in neutral terms, and the ways to write it down.

Knows nothing about caches or engines; every room above hands its findings down as a Report.
"""
