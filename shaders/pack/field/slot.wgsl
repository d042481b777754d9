// Slot `field`: what a field of a tile stands for, and the bits that a number gets. `append` and `quantize` ask for the bits,
// `dequantize` for the number, and each takes a choice that has it.
