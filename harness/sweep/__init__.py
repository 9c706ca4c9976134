"""Sweeps: many simulations of one scenario, its keys varied, on local cores or on a Ray cluster.

    point = settings of scenario keys       cell = point x seed x deployment = one simulation

A sweep file gives a grid, a list of rows, and seeds. Every cell's scenario is resolved and checked
before anything runs, and is sent to where it runs as it was resolved, so that what was checked is
what runs. A cell's id is the hash of that scenario, its deployment and the options: cells that are
already in the results are not run again, and no result depends on who ran it or in which order.

``file`` reads the TOML, ``grid`` and ``cells`` make its cells, ``execution`` runs one, ``local``
and ``on_ray`` run them all, ``results`` keeps them, ``summary`` and ``pareto`` compare the points.
"""
