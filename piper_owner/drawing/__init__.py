"""Pictures and pages: timelines and charts as SVG, and one self-contained HTML page around them. Pure."""
