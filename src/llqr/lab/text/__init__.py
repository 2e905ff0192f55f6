"""Text for sequence models: prepared once, kept in a folder, served in batches of a few shapes.

===============  ==========================================================================================
`prepare`        prepares two files of parallel sentences, or IWSLT14 as distributed, in a folder
`parallel_text`  loads that folder: sentence pairs, vocabulary, tokens to text
`pair_batches`   batches of sentence pairs, by number of tokens, by number of sentences, and for decoding
`token_stream`   prepares and loads any text file as one long sequence of tokens, for language modelling
`windows`        batches of windows of such a sequence
===============  ==========================================================================================
"""
