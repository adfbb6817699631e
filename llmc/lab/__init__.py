"""What must run programs to know something: verifying and measuring artifacts; the compiler proper never imports it."""
