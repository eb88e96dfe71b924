"""After a run: what its model is (model_card), what it answers (sample), and where others find it (push).

Start with model_card: it is made of the files of a run directory alone.
"""
