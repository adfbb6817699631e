"""Tools for looking into finished artifacts: the build report and comparisons."""
