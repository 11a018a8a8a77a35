"""Does what a prefix cache gives back equal what a run without it computes?"""
