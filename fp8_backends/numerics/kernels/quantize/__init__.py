"""The casts from high precision to FP8 codes with scales, in the layouts that products read."""
