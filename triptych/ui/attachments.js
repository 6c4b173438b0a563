// Media attached in the playground: chosen, dropped, pasted or taken with the camera.

import { byId, h, reconcile, say, show } from "./dom.js";
import { bytes, count, plural } from "./format.js";
import { newName } from "./net.js";

const UNKNOWN = "unknown_media"; // the code of the error that a uuid stands for nothing

/** A list of files with their data URLs. `onChange` is called whenever it changes. */
export class Attachments {
  constructor(onChange) {
    this.list = [];
    this.views = new Map();
    this.onChange = onChange;
    this.number = 0;
    this.plans = [];
    this.upload = null; // that is under way: a promise that resolves at its end
  }

  async add(files) {
    const refused = [];
    for (const file of files) {
      const modality = ["image", "video", "audio"].find((kind) => file.type.startsWith(`${kind}/`));
      if (!modality) {
        refused.push(`${file.name} is neither a picture, a video nor audio.`);
        continue;
      }
      try {
        const url = await dataUrl(file);
        this.number += 1;
        this.list.push({ key: this.number, modality, url, name: file.name || `pasted.${modality}`, kind: file.type, size: file.size, file, uuid: newName(), isSent: false, drops: 0 });
      } catch {
        refused.push(`${file.name} can't be read.`);
      }
    }
    this.changed(refused.join(" "));
  }

  remove(key) {
    this.list = this.list.filter((one) => one.key !== key);
    this.changed("");
  }

  /** `refused` says which files aren't in the list, and why. */
  changed(refused) {
    say(byId("files-error"), refused);
    show(byId("files-error"), refused !== "");
    this.plans = [];
    this.draw();
    this.onChange();
  }

  /** Shows what becomes of each item; `plans` is in the order of the items. */
  setPlans(plans) {
    this.plans = plans;
    this.draw();
  }

  draw() {
    this.list.forEach((one, index) => (one.plan = this.plans[index]));
    reconcile(this.views, byId("items"), this.list, (one) => one.key, (one) => new Item(one, () => this.remove(one.key)));
  }

  parts() {
    return this.list.map(({ modality, url }) => ({ type: `${modality}_url`, [`${modality}_url`]: { url } }));
  }

  /** Calls `send` with parts in which media that the service has are named only, and returns what it returns. `send`
   *  calls its second argument once the service has them all. What the service has dropped is sent again: the item that it
   *  misses or, if it misses another one then, all of them. */
  async sendOnce(send) {
    const list = [...this.list];
    for (let misses = 0; ; misses += 1) {
      while (this.upload && list.some((one) => !isNamed(one))) await this.upload.promise;
      try {
        return await this.sendNew(list, send);
      } catch (error) {
        if (error.code !== UNKNOWN || misses > 1) throw error;
        const missing = misses ? undefined : list[/content\[(\d+)\]/.exec(error.param)?.[1]];
        if (missing) missing.drops += 1;
        for (const one of missing ? [missing] : list) one.isSent = false;
      }
    }
  }

  async sendNew(list, send) {
    const named = list.filter(isNamed);
    const upload = Promise.withResolvers();
    if (named.length < list.length) this.upload = upload;
    const end = () => {
      if (this.upload === upload) this.upload = null;
      upload.resolve();
    };
    const parts = list.map((one) => ({ type: `${one.modality}_url`, [`${one.modality}_url`]: named.includes(one) ? null : { url: one.url }, uuid: one.uuid }));
    const hasThem = () => {
      for (const one of list) one.isSent = true;
      for (const one of named) one.drops = 0;
      end();
    };
    try {
      return await send(parts, hasThem);
    } finally {
      end();
    }
  }
}

/** Whether a name is enough. An item that the service has dropped twice as soon as it had it is always sent. */
const isNamed = ({ isSent, drops }) => isSent && drops < 2;

class Item {
  constructor(item, remove) {
    this.plan = h("span", { class: "item-plan" });
    const button = h("button", { type: "button", class: "quiet", "aria-label": `Remove ${item.name}`, text: "Remove" });
    button.addEventListener("click", () => {
      remove();
      byId("choose").focus();
    });
    this.element = h("li", { class: "item" }, preview(item), h("div", {}, h("div", { class: "item-name", text: item.name }), this.plan), button);
  }

  update({ plan, size }) {
    if (!plan) {
      say(this.plan, bytes(size));
      return;
    }
    const facts = [sizeOf(plan), partsOf(plan), `${count(plan.tokens)} tokens`, `cost ${plan.cost.toLocaleString("en", { maximumFractionDigits: 1 })}`, plan.cached && "encoded already"];
    say(this.plan, facts.filter(Boolean).join(" · "));
  }
}

/** What the file has, and what it is resized to: `1920 × 1080 → 896 × 504`. */
function sizeOf({ seconds, file_size, size }) {
  const length = seconds === undefined ? "" : `${seconds.toFixed(1)} s`;
  const areas = [file_size, size].filter(Boolean).map(({ width, height }) => `${width} × ${height}`);
  return [length, [...new Set(areas)].join(" → ")].filter(Boolean).join(", ");
}

/** Like `5 tiles` or `32 frames, 16 steps in time`; empty if it stays whole. */
function partsOf({ type, frames, parts, grid_thw: [steps] }) {
  if (type === "video") return plural(frames, "frame") + (steps === frames ? "" : `, ${plural(steps, "step")} in time`);
  return parts > 1 ? plural(parts, type === "image" ? "tile" : "part") : "";
}

function preview(item) {
  if (item.modality !== "image") return h("div", { class: "preview", text: item.modality });
  const url = URL.createObjectURL(item.file);
  const image = h("img", { class: "preview", alt: "", src: url });
  const release = () => URL.revokeObjectURL(url);
  image.addEventListener("load", release);
  image.addEventListener("error", release);
  return image;
}

const dataUrl = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = reject;
    reader.readAsDataURL(file);
  });

/** Lets the viewer drop, paste, choose and photograph while `area` is shown. Files may be dropped anywhere on the page:
 *  beside the area, the browser would leave the page for the file. */
export function acceptFiles(attachments, area) {
  const filesOf = (transfer) => [...(transfer?.files ?? [])];
  const brings = (event) => !area.hidden && event.dataTransfer?.types.includes("Files"); // and not text for the question
  document.addEventListener("dragover", (event) => {
    if (!brings(event)) return;
    event.preventDefault();
    area.classList.add("dragging");
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget || area.classList.remove("dragging"));
  document.addEventListener("drop", (event) => {
    if (!brings(event)) return;
    event.preventDefault();
    area.classList.remove("dragging");
    attachments.add(filesOf(event.dataTransfer));
  });
  document.addEventListener("paste", (event) => {
    const files = filesOf(event.clipboardData);
    if (area.hidden || !files.length) return;
    event.preventDefault();
    attachments.add(files);
  });
  byId("choose").addEventListener("click", () => byId("files").click());
  byId("files").addEventListener("change", (event) => {
    attachments.add([...event.target.files]);
    event.target.value = "";
  });
  byId("camera").addEventListener("click", () => photograph((file) => attachments.add([file])));
}

async function photograph(onPicture) {
  const dialog = byId("camera-dialog");
  const view = byId("camera-view");
  let stream = null;
  const end = () => {
    stream?.getTracks().forEach((track) => track.stop());
    view.srcObject = null;
    dialog.close();
  };
  show(byId("camera-error"), false);
  byId("camera-take").disabled = true;
  byId("camera-cancel").onclick = end;
  dialog.oncancel = end;
  byId("camera-take").onclick = () => {
    const canvas = h("canvas", { width: view.videoWidth, height: view.videoHeight });
    canvas.getContext("2d").drawImage(view, 0, 0);
    canvas.toBlob((blob) => blob && onPicture(new File([blob], "camera.jpg", { type: "image/jpeg" })), "image/jpeg", 0.92);
    end();
  };
  dialog.showModal();
  try {
    if (!navigator.mediaDevices) throw new Error("the browser offers cameras only to pages on this machine or over HTTPS");
    stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    if (!dialog.open) return end();
    view.onloadeddata = () => (byId("camera-take").disabled = false); // there is no picture before
    view.srcObject = stream;
  } catch (error) {
    say(byId("camera-error"), `No camera: ${error.message}`);
    show(byId("camera-error"), true);
  }
}
