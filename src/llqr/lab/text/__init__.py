"""Text for sequence models: prepared once, kept in one file, served in batches of a few shapes.

==============  ==========================================================================================
`corpus`        reads raw parallel text: two aligned files per split, or IWSLT14 as distributed
`subwords`      byte-pair encoding
`prepare`       turns raw text into tokens, for translation or for language modelling
`prepared`      saves and loads the result: `ParallelText`, `TokenStream`
`batches`       batches of sentence pairs, by number of tokens, by number of sentences, and for decoding; of windows
==============  ==========================================================================================
"""
