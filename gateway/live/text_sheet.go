package live

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// sheet is a page of text that is being written. No line is wider than width, and none has control characters for the terminal.
type sheet struct {
	width int
	lines []string
}

// linesOfAText is how many lines a sentence or a command may take.
const linesOfAText = 8

// row adds one line, and cuts it at the width.
func (s *sheet) row(format string, args ...any) {
	line := clean(fmt.Sprintf(format, args...))
	if columns(line) > s.width {
		line = cut(line, s.width-1) + "…"
	}
	s.lines = append(s.lines, strings.TrimRight(line, " "))
}

// say adds text in as many lines as it needs, up to linesOfAText.
func (s *sheet) say(indent int, text string) {
	for i, line := range fill(strings.Fields(clean(text)), s.width-indent-2) {
		s.lines = append(s.lines, strings.Repeat(" ", indent+2*min(i, 1))+line)
	}
}

// run adds a shell command in lines that can be copied and run as they are. It breaks lines after a space outside of quotes or, if there is
// none, inside a word.
func (s *sheet) run(command string) {
	command = clean(command)
	quote := rune(0) // the quote that is open at the begin of the line; 0: none
	for range linesOfAText {
		if columns(command) <= s.width {
			s.lines = append(s.lines, command)
			return
		}
		used, at, space, within := 0, 0, 0, quote
		for i, r := range command {
			if used += columnsOf(r); used > s.width-2 {
				break
			}
			at = i + utf8.RuneLen(r)
			switch {
			case r == within:
				within = 0
			case within == 0 && (r == '\'' || r == '"'):
				within = r
			case within == 0 && r == ' ':
				space = at
			}
		}
		if space > 0 {
			at, within = space, 0
		}
		line, next := command[:at]+`\`, command[at:]
		if within == '\'' { // a backslash has no meaning inside single quotes
			line, next, within = command[:at]+`'\`, "'"+next, 0
		}
		s.lines = append(s.lines, line)
		command, quote = next, within
	}
	s.row("…")
}

// clean replaces control characters, because names of models, engines and requests come from outside and a terminal would obey them.
func clean(text string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case !unicode.IsPrint(r): // control characters, and those that change the direction of text
			return unicode.ReplacementChar
		}
		return r
	}, text)
}

// columns returns the greatest width of a text on the screen. Some characters take two columns. Only those that this page draws itself are
// known to take one; a wrong guess just leaves room.
func columns(text string) (n int) {
	for _, r := range text {
		n += columnsOf(r)
	}
	return n
}

// columnsOf returns how many columns a character takes at most.
func columnsOf(r rune) int {
	if r < 0x1100 || r >= 0x2010 && r <= 0x2027 || r >= 0x2190 && r <= 0x21ff || r >= 0x2580 && r <= 0x259f {
		return 1
	}
	return 2
}

// cut returns as much of the beginning of a text as fits.
func cut(text string, width int) string {
	for i, r := range text {
		if width -= columnsOf(r); width < 0 {
			return text[:i]
		}
	}
	return text
}

// tail shortens a name to its end, because names of engines differ there.
func tail(name string, width int) string {
	name = clean(name)
	if columns(name) <= width {
		return name
	}
	runes := []rune(name)
	for runes = runes[max(0, len(runes)-width):]; columns(string(runes)) >= width; {
		runes = runes[1:]
	}
	return "…" + string(runes)
}

// padded fills a text with spaces up to a width.
func padded(text string, width int) string {
	return text + strings.Repeat(" ", max(0, width-columns(text)))
}

// fill distributes words over lines, and breaks words that are wider than a line. If there are too many lines, the last one is an ellipsis.
func fill(words []string, width int) (lines []string) {
	for len(words) > 0 {
		line, n := words[0], 1
		for n < len(words) && columns(line)+1+columns(words[n]) <= width {
			line += " " + words[n]
			n++
		}
		head := cut(line, width)
		if head != line {
			words[0] = line[len(head):]
		} else {
			words = words[n:]
		}
		if len(words) > 0 && len(lines) == linesOfAText-1 {
			return append(lines, "…")
		}
		lines = append(lines, head)
	}
	return lines
}
