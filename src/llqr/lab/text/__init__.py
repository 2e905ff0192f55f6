"""Parallel text: prepared once, kept in one file, served in batches of a few shapes.

==============  ==========================================================================================
`corpus`        reads raw parallel text: two aligned files per split, or IWSLT14 as distributed
`subwords`      byte-pair encoding
`prepared`      turns raw text into tokens, `ParallelText`, and keeps them in one file
`batches`       batches of sentence pairs, by number of tokens, by number of sentences, and for decoding
==============  ==========================================================================================
"""
