"""What pyproject.toml cannot say: recipes and configurations, which stand beside the package, go into its wheel."""

from setuptools import find_packages, setup

BESIDE = {"remat.conf": "conf", "remat.recipes": "recipes", "remat.ds_configs": "ds_configs"}

setup(
    packages=[*find_packages(include=["remat*"]), *BESIDE],
    package_dir=BESIDE,
    package_data={name: ["**/*.yaml", "**/*.json"] for name in BESIDE},
)
