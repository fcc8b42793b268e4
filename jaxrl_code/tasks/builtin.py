"""Built-in tasks: real tabular data sets that PyPI packages ship, and what is asked of each.

Small on purpose (prepared.MAX_TRAIN rows at most): a forest of 100 trees fits in under half a second on one core. The
data come from scikit-learn, and from bokeh-sampledata, which states the licence of every file.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn import datasets

PROBABILITIES = "multi_class_log_loss"  # a submission has one column a class
CLASSIFICATION = ("accuracy", "auc", "log_loss", PROBABILITIES)


@dataclasses.dataclass(frozen=True)
class Builtin:
    """A task and how to make it. `frame` gives its rows: the target among the columns, no id."""

    id: str
    name: str
    summary: str  # two sentences: what is asked, what a submission holds
    metric: str
    target: str
    frame: Callable[[], pd.DataFrame]
    source: str  # where the data come from, and their licence
    id_column: str = "id"


def _sampledata(file: str) -> Path:
    found = importlib.util.find_spec("bokeh_sampledata")
    if found is None or not found.submodule_search_locations:
        raise ValueError(
            "the package bokeh-sampledata is missing; install it with: pip install 'bokeh-sampledata>=2026.1'"
        )
    path = Path(found.submodule_search_locations[0]) / "_data" / file
    if not path.is_file():
        raise ValueError(f"bokeh-sampledata has no {file}; install it with: pip install 'bokeh-sampledata>=2026.1'")
    return path


def _titanic() -> pd.DataFrame:
    frame = pd.read_csv(_sampledata("titanic_all.csv"), na_values={"class": "*"})
    return frame.rename(columns={"class": "ticket_class"})


def _movies() -> pd.DataFrame:
    """Films with at least 20 reviews. Nothing that is only known after the reviews is kept."""
    query = """
        select o.Title, o.Year, o.Runtime, o.Genre, o.Director, o.Language, o.Country, t.Meter from omdb o
        join tomatoes t on o.ID = t.ID where t.Reviews >= 20 and t.Meter is not null order by o.ID
    """
    connection = sqlite3.connect(f"file:{_sampledata('movies.db')}?mode=ro", uri=True)
    try:
        frame = pd.read_sql(query, connection)
    finally:
        connection.close()
    frame.columns = frame.columns.str.lower()
    return frame.assign(fresh=(frame.pop("meter") >= 60).astype(int))


def _life_expectancy() -> pd.DataFrame:
    frame = pd.read_csv(_sampledata("gapminder.csv.gz")).dropna(subset="life_expectancy")
    frame["population"] = frame["population"].round().astype("Int64")  # keeps empty cells empty
    frame["fertility"] = frame["fertility"].round(2)
    return frame.assign(life_decades=(frame.pop("life_expectancy") / 10).round(4))


def _auto_mpg() -> pd.DataFrame:
    names = {"cyl": "cylinders", "displ": "displacement", "hp": "horsepower", "accel": "acceleration", "yr": "year"}
    frame = pd.read_csv(_sampledata("auto-mpg.csv")).rename(columns=names)
    frame["origin"] = frame["origin"].replace({1: "usa", 2: "europe", 3: "japan"})
    return frame


def _penguins() -> pd.DataFrame:
    frame = pd.read_csv(_sampledata("penguins.csv")).dropna(subset="body_mass_g")
    return frame.assign(body_mass_kg=frame.pop("body_mass_g") / 1000)


def _glass() -> pd.DataFrame:
    return pd.read_csv(_sampledata("forensic_glass.csv")).round(4)


def _breast_cancer() -> pd.DataFrame:
    bunch: Any = datasets.load_breast_cancer(as_frame=True)
    frame = bunch.data.rename(columns=lambda name: name.replace(" ", "_"))
    return frame.assign(malignant=(bunch.target == 0).astype(int))


def _wine() -> pd.DataFrame:
    bunch: Any = datasets.load_wine(as_frame=True)
    frame = bunch.data.rename(columns={"od280/od315_of_diluted_wines": "od280_od315"})
    return frame.assign(cultivar=np.array(["barolo", "grignolino", "barbera"])[bunch.target])


def _digits() -> pd.DataFrame:
    bunch: Any = datasets.load_digits(as_frame=True)
    return bunch.data.astype(int).assign(digit=bunch.target)


def _diabetes() -> pd.DataFrame:
    bunch: Any = datasets.load_diabetes(as_frame=True, scaled=False)
    return bunch.data.assign(progression=bunch.target / 100)


_SKLEARN = "shipped with scikit-learn (BSD-3-Clause)"
_BOKEH = "shipped with bokeh-sampledata"

BUILTINS = (
    Builtin(
        "titanic-survival",
        "Titanic survival",
        "Predict which passengers survived the sinking of the Titanic. Submit a probability of survival.",
        "auc",
        "survived",
        _titanic,
        f"Historical passenger list, {_BOKEH}, public domain.",
        id_column="passenger_id",
    ),
    Builtin(
        "movie-reception",
        "Movie reception",
        "Predict whether at least 60 % of the critics liked a movie (fresh = 1). Submit a probability.",
        "auc",
        "fresh",
        _movies,
        f"Wikidata contributors, {_BOKEH}, CC0-1.0.",
    ),
    Builtin(
        "breast-cancer",
        "Breast cancer diagnosis",
        "Tell malignant tumours from benign ones by their cell nuclei. Submit the probability of malignant = 1.",
        "log_loss",
        "malignant",
        _breast_cancer,
        f"Breast Cancer Wisconsin (Diagnostic), UCI, CC BY 4.0, {_SKLEARN}.",
    ),
    Builtin(
        "wine-cultivar",
        "Wine cultivar",
        "Tell which of three cultivars a wine was made from by its chemistry. Submit a probability for each.",
        PROBABILITIES,
        "cultivar",
        _wine,
        f"Wine recognition data, UCI, CC BY 4.0, {_SKLEARN}.",
    ),
    Builtin(
        "digits",
        "Handwritten digits",
        "Read handwritten digits from 8 x 8 grey pixels. Submit the digit.",
        "accuracy",
        "digit",
        _digits,
        f"Optical recognition of handwritten digits, UCI, CC BY 4.0, {_SKLEARN}.",
    ),
    Builtin(
        "glass-type",
        "Forensic glass",
        "Tell the type of glass of a fragment by its refraction and chemistry. Submit the type.",
        "accuracy",
        "type",
        _glass,
        f"Glass identification data, {_BOKEH}, public domain.",
    ),
    Builtin(
        "diabetes-progression",
        "Diabetes progression",
        "Predict how far diabetes has progressed a year after the measurements, in hundreds. Submit a number.",
        "rmse",
        "progression",
        _diabetes,
        f"Efron et al., Least Angle Regression (2004), {_SKLEARN}.",
        id_column="patient_id",
    ),
    Builtin(
        "penguin-mass",
        "Penguin body mass",
        "Predict the body mass of penguins in kilograms from their species, island and measurements. Submit a number.",
        "rmse",
        "body_mass_kg",
        _penguins,
        f"Gorman, Palmer Station Antarctica LTER; Horst, Hill and Gorman (2020), palmerpenguins, {_BOKEH}, CC0-1.0.",
    ),
    Builtin(
        "auto-mpg",
        "Fuel economy",
        "Predict how many miles per gallon cars of the seventies went. Submit a number above zero.",
        "rmsle",
        "mpg",
        _auto_mpg,
        f"Donoho and Ramos (1982), CRCARS, {_BOKEH}, CC0-1.0.",
        id_column="car_id",
    ),
    Builtin(
        "life-expectancy",
        "Life expectancy",
        "Predict life expectancy, in decades, by country, year, fertility and population. Submit a number.",
        "rmse",
        "life_decades",
        _life_expectancy,
        f"Gapminder.org and the original providers that it names, {_BOKEH}, CC BY 2.0.",
    ),
)
