"""The paper's toy landscapes: experiments, figures and their report."""
