// Lets the search work when the pages are opened as local files: browsers start no web worker from a file.
// The script of the worker runs in a hidden frame instead. The theme looks for a class with this name.
"use strict";

if (location.protocol === "file:") {
  window.IFrameWorker = class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      // Some browsers replace the empty document of a new frame later, unless it was written to.
      inside.document.open();
      inside.document.write("<!doctype html><title>worker</title><body>");
      inside.document.close();
      // Messages of the worker come back as events of this object.
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      // Messages wait until the script listens.
      this.ready = new Promise((resolve, reject) => {
        script.onload = resolve;
        script.onerror = () => reject(new Error(`cannot load ${url}`));
      });
      script.src = new URL(url, document.baseURI).href;
      inside.document.body.append(script);
    }

    postMessage(data) {
      const inside = this.frame.contentWindow;
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
