"""The mathematics of pages: keys or values <-> packed streams.

Owns rotations, codebooks, bit packing, scales and the codecs made of them.  Knows no file, no page
table and no softmax: `tqstore.quant.registry` gives a codec for a page spec, and that is all that
the floors above use.
"""
