// Mouse, touch and keys.

class Controls {
  constructor(page) {
    this.page = page;
    this.mouse(page.canvas);
    this.scrub(page.overviewCanvas);
    document.addEventListener("keydown", (event) => {
      if (!event.target.closest("select, pre, aside, input, summary")) this.key(event); // those have uses of their own for keys
    });
    const click = (id, act) => byId(id).addEventListener("click", () => page.change(act));
    const middle = () => GUTTER + page.view.plotWidth / 2, centre = () => HEAD + page.view.plotHeight / 2;
    click("zoom-in", () => page.view.zoom(0.5, middle()));
    click("zoom-out", () => page.view.zoom(2, middle()));
    click("taller", () => page.view.zoomLanes(1.5, centre()));
    click("flatter", () => page.view.zoomLanes(1 / 1.5, centre()));
    click("fit", () => page.view.fit());
    click("previous", () => page.step(-1));
    click("next", () => page.step(1));
    byId("search").addEventListener("keydown", (event) => {
      if (event.key === "Enter") page.nextHit(event.shiftKey ? -1 : 1);
      if (event.key === "Escape") page.canvas.focus();
    });
    byId("help").addEventListener("click", () => this.help());
  }

  help() {
    byId("keys").hidden = !byId("keys").hidden;
    byId("help").setAttribute("aria-expanded", String(!byId("keys").hidden));
  }

  mouse(canvas) {
    const { page } = this;
    let from = null, moved = false;
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      from = [event.offsetX, event.offsetY];
      moved = false;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (from) {
        const [dx, dy] = [event.offsetX - from[0], event.offsetY - from[1]];
        if (!moved && Math.hypot(dx, dy) < 4) return;
        moved = true;
        canvas.classList.add("dragging");
        from = [event.offsetX, event.offsetY];
        page.change(() => page.view.pan(dx, dy));
      } else page.hover(event.offsetX, event.offsetY);
    });
    const up = (event) => {
      if (from && !moved) page.choose(pick(page.trace, page.view, event.offsetX, event.offsetY)?.collective ?? -1);
      from = null;
      canvas.classList.remove("dragging");
    };
    canvas.addEventListener("pointerup", up);
    canvas.addEventListener("pointercancel", () => (from = null));
    canvas.addEventListener("pointerleave", () => page.hover(-1, -1));
    canvas.addEventListener("dblclick", () => page.change(() => page.view.fit()));
  }

  wheel(event) {
    event.preventDefault();
    const { page } = this, unit = event.deltaMode === 1 ? 16 : 1;
    const [dx, dy] = [event.deltaX * unit, event.deltaY * unit];
    page.change(() => {
      if (event.altKey) page.view.zoomLanes(Math.exp(-dy / 300), event.offsetY);
      else if (event.shiftKey) page.view.pan(0, -(dy || dx));
      else {
        if (dx) page.view.pan(-dx, 0);
        if (dy) page.view.zoom(Math.exp(dy / 300), event.offsetX);
      }
    });
  }

  /** Let the overview move what is seen to where it is pressed. */
  scrub(canvas) {
    const { page } = this;
    const move = (event) => {
      if (!event.buttons) return;
      const { track } = page.view, part = (event.offsetX - GUTTER) / Math.max(1, canvas.clientWidth - GUTTER);
      const centre = track.begin + part * (track.end - track.begin), half = (page.view.end - page.view.begin) / 2;
      page.change(() => page.view.span(centre - half, centre + half));
    };
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      move(event);
    });
    canvas.addEventListener("pointermove", move);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || (event.key === "Enter" && event.target.closest("button"))) return;
    const { page } = this, { view } = page, middle = GUTTER + view.plotWidth / 2, centre = HEAD + view.plotHeight / 2;
    const far = view.plotWidth / 8, lanes = Math.max(40, view.laneHeight), screen = view.plotHeight * 0.9;
    const acts = {
      ArrowLeft: () => view.pan(far, 0), ArrowRight: () => view.pan(-far, 0),
      ArrowUp: () => view.pan(0, lanes), ArrowDown: () => view.pan(0, -lanes),
      PageUp: () => view.pan(0, screen), PageDown: () => view.pan(0, -screen),
      "+": () => view.zoom(0.5, middle), "=": () => view.zoom(0.5, middle), "-": () => view.zoom(2, middle),
      ">": () => view.zoomLanes(1.5, centre), "<": () => view.zoomLanes(1 / 1.5, centre),
      w: () => view.zoom(0.5, middle), s: () => view.zoom(2, middle), a: () => view.pan(far, 0), d: () => view.pan(-far, 0),
      0: () => view.fit(), Home: () => view.fit(), "[": () => page.step(-1), "]": () => page.step(1),
      Enter: () => page.zoomToChosen(), e: () => page.goToTrouble(), Escape: () => (byId("keys").hidden ? page.choose(-1) : this.help()), "?": () => this.help(), "/": () => byId("search").focus(),
    };
    const act = acts[event.key];
    if (!act) return;
    event.preventDefault();
    page.change(act);
  }
}
