"""HTML for people: what a run found as a page that needs nothing but itself.

Data flows Run and trials → `answer`, `measured`, `roofline`, `steps`, `searched`, `source` (plain words and places of
marks) → `report_page` → `rendering` (jinja2 over `templates/`) → `page_file`. Templates decide nothing; modules write
no HTML.
"""
