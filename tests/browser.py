"""Headless browser, and the forms of the Prefect UI."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.remote.webelement import WebElement
from waiting import wait_for

LIMIT_S = 60.0


@contextmanager
def browser(width: int = 1200, height: int = 1400) -> Iterator[WebDriver]:
    """Run Debian's Chromium with its packaged driver, so that Selenium downloads nothing."""
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    missing = [name for name, path in programs.items() if not path]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: on Debian, `apt-get install chromium chromium-driver`")
    options = webdriver.ChromeOptions()
    options.binary_location = programs["chromium"] or ""
    # Chromium needs --no-sandbox as root, and --disable-dev-shm-usage with the small /dev/shm of a container.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--window-size={width},{height}"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(programs["chromedriver"]))
    try:
        yield driver
    finally:
        driver.quit()


def page_text(driver: WebDriver) -> str:
    """Return the visible text of the page."""
    return str(driver.execute_script("return document.body.innerText"))


def link_of(driver: WebDriver, text: str) -> str:
    """Return the URL of the link with a text, in one script call because the page may re-render at any time."""
    script = "return [...document.links].find(link => link.innerText.trim() === arguments[0])?.href ?? ''"
    return str(driver.execute_script(script, text))


def wait_for_text(driver: WebDriver, text: str, limit_s: float = LIMIT_S) -> None:
    try:
        wait_for(lambda: text in page_text(driver), f"the text {text!r}", limit_s)
    except AssertionError as error:
        raise AssertionError(f"{error}; the page shows:\n{page_text(driver)[-3000:]}") from None


class Form:
    """Form of parameters on the open page."""

    def __init__(self, driver: WebDriver) -> None:
        self._driver = driver

    def field(self, title: str, within: WebElement | None = None) -> WebElement:
        """Return the field below a title."""
        label = f".//label[normalize-space()='{title}' or normalize-space()='{title} (Optional)']"
        path = f"{label}/ancestor::div[following-sibling::fieldset][1]/following-sibling::fieldset[1]"
        root = within or self._driver
        return wait_for(lambda: next(iter(root.find_elements(By.XPATH, path)), None), f"a field {title!r}")

    def items(self, title: str) -> list[WebElement]:
        """Return the items of a list field."""
        path = ".//button[@aria-label='Drag to reorder']/.."
        return self.field(title).find_elements(By.XPATH, path)

    def add_item(self, title: str) -> WebElement:
        """Append an item to a list field and return it."""
        num_items = len(self.items(title))
        self.click(self.field(title).find_elements(By.XPATH, ".//button[normalize-space()='Add item']")[-1])
        return wait_for(lambda: (items := self.items(title))[num_items:] and items[-1], "a new item")

    def fill_in(self, title: str, text: str, within: WebElement | None = None) -> None:
        """Replace the text of a field."""
        box = self.field(title, within).find_element(By.XPATH, ".//input | .//textarea")
        self._show(box)
        box.send_keys(Keys.CONTROL, "a")
        box.send_keys(text)

    def choose(self, title: str, option: str, within: WebElement | None = None) -> list[str]:
        """Choose an option of a select field; return all options."""
        self.click(self.field(title, within).find_element(By.XPATH, ".//button[@aria-haspopup='listbox']"))
        options = wait_for(lambda: self._driver.find_elements(By.XPATH, "//*[@role='option']"), "options")
        texts = [element.text for element in options]
        self.click(options[texts.index(option)])
        return texts

    def show_tab(self, title: str, tab: str, within: WebElement | None = None) -> None:
        """Select the tab for another type of value in a field that accepts several types."""
        path = f".//button[@role='tab'][normalize-space()='{tab}']"
        self.click(self.field(title, within).find_element(By.XPATH, path))

    def submit(self, label: str = "Submit") -> None:
        """Click the button that sends the form."""
        self.click(self._driver.find_element(By.XPATH, f"//button[normalize-space()='{label}']"))

    def click(self, element: WebElement) -> None:
        self._show(element)
        element.click()

    def _show(self, element: WebElement) -> None:
        self._driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)


class RunForm(Form):
    """Page *Custom run* of a deployment."""

    def __init__(self, driver: WebDriver, ui: str, deployment_id: str) -> None:
        super().__init__(driver)
        driver.get(f"{ui}/v2/deployments/deployment/{deployment_id}/run")
        wait_for_text(driver, "Add item")


def screenshot(driver: WebDriver, path: Path, height: int) -> None:
    """Save a screenshot of a window with the given height."""
    width = driver.get_window_size()["width"]
    driver.set_window_size(width, height)
    time.sleep(1.0)  # wait for animations
    driver.save_screenshot(str(path))
