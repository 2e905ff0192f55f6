"""Text for sequence models: prepared once, kept in a folder, handed out in batches of few shapes.

=============  ============================================================================================
`prepare`      two files of parallel sentences, or IWSLT14 as it was distributed, into a prepared folder
`prepared`     the prepared folder: pairs, vocabulary, text out of tokens
`batches`      batches of pairs by number of tokens, by number of sentences, and for decoding
`stream`       any text file into a prepared folder, as one long row of tokens for language modelling
`windows`      batches of windows of such a row
=============  ============================================================================================
"""
