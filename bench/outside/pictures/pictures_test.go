package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTerminalPage(t *testing.T) {
	require.Equal(t, terminalHead+"a &lt;b&gt; &amp; c █\n</pre>\n", terminalPage("a <b> & c █\n\n\n"), "text is text, whatever it says")
}
