// Preact with htm: every module imports what it renders with from here.
import { Fragment, createContext, h, render } from "./vendor/preact.js";
import {
  useCallback, useContext, useEffect, useErrorBoundary, useId, useLayoutEffect, useMemo, useRef, useState,
} from "./vendor/hooks.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);
export {
  Fragment, createContext, h, render, useCallback, useContext, useEffect, useErrorBoundary, useId, useLayoutEffect,
  useMemo, useRef, useState,
};
