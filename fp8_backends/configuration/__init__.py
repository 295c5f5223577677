"""Configuration files of Accelerate and Axolotl: what they mean here, and the same as a file of Accelerate."""
