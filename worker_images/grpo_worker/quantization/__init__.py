"""FP8 quantization in blocks of 128 x 128."""
