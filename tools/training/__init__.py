"""`dspark train`: the target writes the data, its tapped states are stored once, the drafter learns from them."""
