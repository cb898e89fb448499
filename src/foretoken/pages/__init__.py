"""Reports as one HTML page with plots as inline SVG: nothing to load, nothing to install.

`svg` has the parts of a plot, `page` what pages have in common. `bench` and `audit` draw with them.
"""
