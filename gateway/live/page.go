package live

import (
	"embed"
	"io/fs"
	"net/http"
	"path"

	"evenkeel/docs"
)

//go:embed page
var files embed.FS

// contentPolicy lets the page load only files of this listener. It also prevents that text becomes markup or code, because names of models,
// engines and requests come from outside.
const contentPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// Page returns handlers for the page's files by their paths: / is the page, and /page/ has its modules. The files tell nothing about the
// proxy, so they need no token. The page itself asks for the token.
func Page() map[string]http.Handler {
	pages, err := fs.Sub(files, "page")
	if err != nil { // the folder is embedded, so it exists
		panic(err)
	}
	all := map[string]http.Handler{}
	for at, name := range map[string]string{"/{$}": "index.html", "/live.js": "live.js", "/live.css": "live.css", "/live.svg": "live.svg"} {
		all[at] = strictly(func(w http.ResponseWriter, r *http.Request) { http.ServeFileFS(w, r, pages, name) })
	}
	all["/page/{module}"] = strictly(func(w http.ResponseWriter, r *http.Request) {
		name := r.PathValue("module")
		if path.Ext(name) != ".js" {
			http.NotFound(w, r)
			return
		}
		http.ServeFileFS(w, r, pages, name)
	})
	all["/runbook.md"] = strictly(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/markdown; charset=utf-8")
		_, _ = w.Write(docs.Runbook) // the operator left
	})
	return all
}

// strictly serves a file with headers that limit what a browser may do with it.
func strictly(serve http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", contentPolicy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("X-Frame-Options", "DENY")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cache-Control", "no-cache") // another version of the program may have another page
		serve(w, r)
	})
}
