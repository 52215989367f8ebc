// Package docs holds the documents that the program shows by itself.
package docs

import _ "embed"

// Runbook has an entry for every alert, and for every incident of the live page.
//
//go:embed runbook.md
var Runbook []byte
