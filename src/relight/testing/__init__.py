"""The public test kit: kill points, faulty files, forked trainers."""
