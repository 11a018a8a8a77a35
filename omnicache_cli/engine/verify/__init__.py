"""A real engine as `omnicache verify` needs it: runs with a tensor cache and without."""
