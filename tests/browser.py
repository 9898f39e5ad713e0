"""A real browser without a screen, and the form of a deployment's run in the Prefect UI."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.remote.webelement import WebElement

T = TypeVar("T")

LIMIT_S = 60.0


@contextmanager
def browser(width: int = 1200, height: int = 1400) -> Iterator[WebDriver]:
    """Debian's Chromium by its own driver; nothing is looked for in the network."""
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    absent = [name for name, path in programs.items() if not path]
    if absent:
        pytest.fail(f"{' and '.join(absent)} is not installed: on Debian `apt-get install chromium chromium-driver`.")
    options = webdriver.ChromeOptions()
    options.binary_location = programs["chromium"] or ""
    # As root, and with the small /dev/shm of a container, it starts only so.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--window-size={width},{height}"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(programs["chromedriver"]))
    try:
        yield driver
    finally:
        driver.quit()


def wait_for(found: Callable[[], T | None], what: str, limit_s: float = LIMIT_S) -> T:
    """What a page shows sooner or later."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if result := found():
            return result
        time.sleep(0.2)
    raise AssertionError(f"the page did not show {what} within {limit_s:.0f} s")


def page_text(driver: WebDriver) -> str:
    """All that can be read on the page."""
    return str(driver.execute_script("return document.body.innerText"))


def link_of(driver: WebDriver, text: str) -> str:
    """Where a link of this text leads, read at once: the page may make its elements anew at any time."""
    find = "return [...document.links].find(link => link.innerText.trim() === arguments[0])?.href ?? ''"
    return str(driver.execute_script(find, text))


def wait_for_text(driver: WebDriver, text: str, limit_s: float = LIMIT_S) -> None:
    try:
        wait_for(lambda: text in page_text(driver), repr(text), limit_s)
    except AssertionError as error:
        raise AssertionError(f"{error}; it shows:\n{page_text(driver)[-3000:]}") from None


class RunForm:
    """The page *Custom run* of a deployment."""

    def __init__(self, driver: WebDriver, ui: str, deployment_id: str) -> None:
        self._driver = driver
        driver.get(f"{ui}/v2/deployments/deployment/{deployment_id}/run")
        wait_for_text(driver, "Add item")

    def field(self, title: str, within: WebElement | None = None) -> WebElement:
        """What stands below a title."""
        titled = f".//label[normalize-space()='{title}' or normalize-space()='{title} (Optional)']"
        path = f"{titled}/ancestor::div[following-sibling::fieldset][1]/following-sibling::fieldset[1]"
        root = within or self._driver
        return wait_for(lambda: next(iter(root.find_elements(By.XPATH, path)), None), f"a field {title!r}")

    def items(self, title: str) -> list[WebElement]:
        """The objects of a list."""
        path = ".//button[@aria-label='Drag to reorder']/.."
        return self.field(title).find_elements(By.XPATH, path)

    def add_item(self, title: str) -> WebElement:
        """A new object at the end of a list."""
        before = len(self.items(title))
        self.click(self.field(title).find_elements(By.XPATH, ".//button[normalize-space()='Add item']")[-1])
        return wait_for(lambda: (found := self.items(title))[before:] and found[-1], "a new item")

    def fill_in(self, title: str, text: str, within: WebElement | None = None) -> None:
        """Type into a field in place of what is there."""
        box = self.field(title, within).find_element(By.XPATH, ".//input | .//textarea")
        self._show(box)
        box.send_keys(Keys.CONTROL, "a")
        box.send_keys(text)

    def choose(self, title: str, option: str, within: WebElement | None = None) -> list[str]:
        """Choose from a list; returns all that it offers."""
        self.click(self.field(title, within).find_element(By.XPATH, ".//button[@aria-haspopup='listbox']"))
        options = wait_for(lambda: self._driver.find_elements(By.XPATH, "//*[@role='option']"), "options")
        offered = [each.text for each in options]
        self.click(next(each for each in options if each.text == option))
        return offered

    def show_tab(self, title: str, tab: str, within: WebElement | None = None) -> None:
        """Take another kind of value where a field may have several."""
        path = f".//button[@role='tab'][normalize-space()='{tab}']"
        self.click(self.field(title, within).find_element(By.XPATH, path))

    def submit(self) -> None:
        self.click(self._driver.find_element(By.XPATH, "//button[normalize-space()='Submit']"))

    def click(self, element: WebElement) -> None:
        self._show(element)
        element.click()

    def _show(self, element: WebElement) -> None:
        self._driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)


def screenshot(driver: WebDriver, path: Path, height: int) -> None:
    """Save what a window of some height shows."""
    width = driver.get_window_size()["width"]
    driver.set_window_size(width, height)
    time.sleep(1.0)  # what slides in has slid in
    driver.save_screenshot(str(path))
