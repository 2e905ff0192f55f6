"""Parallel text: prepared once, kept in one file, served in batches of a few shapes.

==============  ==========================================================================================
`corpus`        reads raw parallel text: two aligned files per split, or IWSLT14 as distributed
`subwords`      byte-pair encoding
`prepare`       turns raw text into tokens
`prepared`      the result, `ParallelText`, and the file it is kept in
`batches`       batches of sentence pairs, by number of tokens, by number of sentences, and for decoding
==============  ==========================================================================================
"""
